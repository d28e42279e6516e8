"""Where a request goes: pure functions over plain state, with a clock."""

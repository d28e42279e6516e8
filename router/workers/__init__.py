"""The fleet as this router holds it: records, channels, streams, breakers, and the policy's live state."""

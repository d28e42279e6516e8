"""Templates, tokens and the text they become."""

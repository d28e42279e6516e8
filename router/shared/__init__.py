"""What several routers have in common, and how they tell each other."""

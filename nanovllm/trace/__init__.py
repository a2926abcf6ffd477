"""A recording of what the engine did, and the page that replays it."""

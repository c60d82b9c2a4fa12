"""Convert parts, recipes and settings to plain values and back, and import users' classes."""

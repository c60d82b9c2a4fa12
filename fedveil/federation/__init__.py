"""A run whose messages come from elsewhere: the server's side of a round."""

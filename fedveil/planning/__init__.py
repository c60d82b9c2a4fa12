"""What a private training will be like, before it: noise against signal, cost, and a verdict."""

"""The privacy chain: what one message can be, what a round releases, and what it costs."""

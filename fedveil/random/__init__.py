"""Sources of randomness: keyed streams, and exact samplers that draw from them."""

"""One parser per data format; each turns files into a `Dataset` and refuses broken bytes."""

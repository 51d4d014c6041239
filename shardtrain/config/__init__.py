"""The program's configuration: words, keys, defaults, and what is refused."""

"""Speed, measured against the memory's own: attention of one layer, and decoding end to end."""

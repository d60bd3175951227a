"""Read, verify, size, cache and order images, captions and sequences."""

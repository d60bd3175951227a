"""Text and images in one model (BAGEL): next token and flow matching together."""

"""BAGEL: a model of text and images, its data, its objective and its sampling."""

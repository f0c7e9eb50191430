"""The product of layout, codecs and placement, by name; what is asked of a model's config."""

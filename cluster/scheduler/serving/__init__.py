"""What a scheduler process serves over HTTP and HTTPS: health, metrics and its state."""

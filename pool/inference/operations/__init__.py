"""Pure functions over results: images, masks, latents, encoded texts and audio."""

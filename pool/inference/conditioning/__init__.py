"""Inputs of a sampling run other than noise: first frames, masks, reference images, regions, control videos."""

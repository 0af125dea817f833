"""Programs around training: evaluation, pictures, play, serving."""

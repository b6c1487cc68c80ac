"""How a data set is cut into what an echo reuses and what runs for each use, and the proof that this is right."""

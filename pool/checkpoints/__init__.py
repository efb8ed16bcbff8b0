"""Files of weights: reading, recognising, mapping their keys, building modules over mapped views."""

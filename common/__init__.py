"""What any phase may use: knows nothing of attention."""

"""The cluster as columns. Only the sources and bookings change them; plugins read them."""

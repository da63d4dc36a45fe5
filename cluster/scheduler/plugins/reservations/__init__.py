"""Reservation: which pods use which reservations, and what room that gives them."""

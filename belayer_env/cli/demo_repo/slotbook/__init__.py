"""Room bookings of one day."""

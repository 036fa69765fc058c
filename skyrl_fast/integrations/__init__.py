"""Stand-ins for functions of other training systems."""

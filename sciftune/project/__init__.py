"""What measures and publishes this project; no part of the wheel."""

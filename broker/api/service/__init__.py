"""Use cases by concern, whatever the door: each builds on the ports, `Service` and the pure decisions."""

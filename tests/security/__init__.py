"""Teams are held apart: by the database, and through every call."""

"""The pages, one module each: it reads by the service layer and names a template."""

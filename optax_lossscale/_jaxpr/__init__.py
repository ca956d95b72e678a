"""Records functions as jaxprs and evaluates the jaxprs with changes."""

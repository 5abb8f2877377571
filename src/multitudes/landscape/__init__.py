"""Why it works: what trained networks look like in weight space, in function space and inside."""

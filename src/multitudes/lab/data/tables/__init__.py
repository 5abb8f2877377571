"""Tables: how columns are read, and the features made from them."""

"""The gradients of what a rank holds: who else holds it, sums, deferral, scale and norm."""

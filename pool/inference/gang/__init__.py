"""Runs that several workers share: how they meet, what each computes, and what they exchange. Only a run with a gang
imports it."""

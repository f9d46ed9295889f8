//! Build chores.

fn main() {}

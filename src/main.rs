//! The gateway and its command line.

fn main() {}

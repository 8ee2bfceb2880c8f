//! nibble-testkit

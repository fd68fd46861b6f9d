//! Tests of the initiator proper.

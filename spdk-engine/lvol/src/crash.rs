//! Why a crash, at any moment, loses nothing that was promised.

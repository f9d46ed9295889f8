//! Stamps, digests and the guest workload (under construction).

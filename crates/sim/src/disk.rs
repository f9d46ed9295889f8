//! A disk that moves: how many of its blocks are dirty.

use crate::scenario::DiskSpec;

#[derive(Clone, Debug)]
pub(crate) struct Disk {
    spec: DiskSpec,
    blocks: f64,
    dirty: f64,
    /// Blocks taken for the pass in progress, still to be sent.
    pending: f64,
    pub(crate) full_pass: bool,
    /// Bytes that the guest wrote in this round.
    pub(crate) written: f64,
    /// Blocks sent, and not known to have arrived.
    flight: f64,
}

impl Disk {
    pub(crate) fn new(spec: DiskSpec) -> Self {
        let granularity = spec.granularity.0 as f64;
        Self {
            spec,
            blocks: (spec.working_set.0 as f64 / granularity).max(1.0),
            dirty: 0.0,
            pending: spec.size.0 as f64 / granularity,
            full_pass: true,
            written: 0.0,
            flight: 0.0,
        }
    }

    pub(crate) fn speed(&self) -> f64 {
        self.spec.speed.bytes_per_second()
    }

    /// The guest writes for `time` seconds, at no more than `limit` bytes each second.
    pub(crate) fn advance(&mut self, time: f64, speed: f64, limit: Option<f64>) {
        let rate =
            (self.spec.writes.bytes_per_second() * speed).min(limit.unwrap_or(f64::INFINITY));
        self.written += rate * time;
        let pieces = rate * time / self.spec.piece.0 as f64;
        // A piece may lie across two blocks, or take several.
        let each = (self.spec.piece.0 as f64 / self.spec.granularity.0 as f64).max(1.0);
        self.dirty =
            self.blocks - (self.blocks - self.dirty) * (-pieces * each / self.blocks).exp();
    }

    /// A round begins: what is dirty is taken.
    pub(crate) fn begin(&mut self) {
        self.written = 0.0;
        if self.pending <= 0.0 {
            self.full_pass = false;
            self.pending = std::mem::take(&mut self.dirty);
        }
    }

    /// Bytes still to be sent in this pass.
    pub(crate) fn pending(&self) -> f64 {
        self.pending * self.spec.granularity.0 as f64
    }

    pub(crate) fn send(&mut self, bytes: f64) {
        self.pending -= bytes / self.spec.granularity.0 as f64;
        self.flight += bytes / self.spec.granularity.0 as f64;
        if self.pending < 1e-6 {
            self.pending = 0.0;
        }
    }

    /// All that was sent has arrived.
    pub(crate) fn placed(&mut self) {
        self.flight = 0.0;
    }

    /// What was sent last is lost, up to `window` bytes.
    pub(crate) fn take_back(&mut self, window: f64) {
        let lost = self.flight.min(window / self.spec.granularity.0 as f64);
        self.pending += lost;
        self.placed();
    }

    /// Bytes dirty or never sent.
    pub(crate) fn remaining(&self) -> f64 {
        (self.pending + self.dirty) * self.spec.granularity.0 as f64
    }
}

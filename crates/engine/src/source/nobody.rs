//! No machine: what a host is asked in the name of when there is no VM.
//!
//! Invariant: its kind has no name, by which a destination knows it; no machine has such a one.

use std::io::Read;
use std::sync::Arc;
use std::time::Instant;

use godwit_memory::RamBlock;
use godwit_track::DirtyTracker;

use crate::vm::{SourceVm, VmError};

/// It has nothing, and nothing can be done with it.
#[derive(Default)]
pub(super) struct Nobody {
    ram: Arc<Vec<RamBlock>>,
}

fn nothing<T>() -> Result<T, VmError> {
    Err("there is no VM".into())
}

impl SourceVm for Nobody {
    fn machine(&self) -> &'static str {
        ""
    }

    fn ram(&self) -> Arc<Vec<RamBlock>> {
        Arc::clone(&self.ram)
    }

    fn was_running(&self) -> bool {
        false
    }

    fn start_tracking(&mut self) -> Result<Arc<dyn DirtyTracker>, VmError> {
        nothing()
    }

    fn open_state(&mut self) -> Result<Box<dyn Read + Send>, VmError> {
        nothing()
    }

    fn stop(&mut self) -> Result<Instant, VmError> {
        nothing()
    }

    fn release_state(&mut self) -> Result<(), VmError> {
        nothing()
    }

    fn state_saved(&mut self) -> Result<(), VmError> {
        nothing()
    }

    fn resume(&mut self) -> Result<(), VmError> {
        Ok(())
    }

    fn retire(&mut self, _keep: bool) -> Result<(), VmError> {
        Ok(())
    }
}

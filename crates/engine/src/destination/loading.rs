//! The device state on its way into the machine.

use std::io::Write;

use super::channel::PEER;
use crate::EngineError;
use crate::vm::DestinationVm;

/// Where device state goes, from the moment that the machine is ready for it to the last piece.
#[derive(Default)]
pub(super) struct Loading {
    sink: Option<Box<dyn Write + Send>>,
}

impl Loading {
    /// Makes the machine ready.
    pub(super) fn prepare(&mut self, vm: &mut dyn DestinationVm) -> Result<(), EngineError> {
        self.sink = Some(vm.prepare().map_err(EngineError::Vm)?);
        Ok(())
    }

    /// Hands a piece to the machine.
    pub(super) fn write(
        &mut self,
        piece: &[u8],
        vm: &mut dyn DestinationVm,
    ) -> Result<(), EngineError> {
        let Some(sink) = &mut self.sink else {
            let what = "it sent device state too early".to_owned();
            return Err(EngineError::Protocol { peer: PEER, what });
        };
        sink.write_all(piece).map_err(|error| {
            // The machine closed its end: why, it knows better.
            self.sink = None;
            vm.finish_load().err().map_or(EngineError::State(error), EngineError::Vm)
        })
    }

    /// No more will come.
    pub(super) fn end(&mut self) {
        self.sink = None;
    }
}

//! The serial port: a 16550 that sends and never receives, polled.
//!
//! Output goes to one writer, a whole burst at a time. The registers are kept and move with the
//! guest; what was sent is out, nothing is buffered.

use std::io::Write;
use std::sync::{Mutex, PoisonError};

use crate::StateError;
use crate::boot_block::SERIAL_PORT;

/// Ports of the device.
pub(crate) const PORTS: std::ops::RangeInclusive<u16> = SERIAL_PORT..=SERIAL_PORT + 7;
/// Line status: transmitter empty, twice.
const READY: u8 = 0x60;
/// Modem status: clear to send, data set ready, carrier.
const CONNECTED: u8 = 0xb0;
const DIVISOR_LATCH: u8 = 0x80;

/// The device.
pub(crate) struct Serial {
    inner: Mutex<Inner>,
}

struct Inner {
    registers: Registers,
    output: Box<dyn Write + Send>,
}

/// What the guest has set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Registers {
    interrupts: u8,
    line: u8,
    modem: u8,
    scratch: u8,
    divisor: [u8; 2],
}

impl std::fmt::Debug for Serial {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Serial").finish_non_exhaustive()
    }
}

impl Serial {
    /// A port whose output goes to `output`.
    #[must_use]
    pub(crate) fn new(output: Box<dyn Write + Send>) -> Self {
        Self { inner: Mutex::new(Inner { registers: Registers::default(), output }) }
    }

    /// The guest writes `bytes`, one after the other, to `port`.
    pub(crate) fn write(&self, port: u16, bytes: &[u8]) {
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        let latch = inner.registers.line & DIVISOR_LATCH != 0;
        let last = bytes.last().copied().unwrap_or(0);
        match port - SERIAL_PORT {
            0 if !latch => {
                // Nobody reads the output any more: no reason to stop the guest.
                let _ = inner.output.write_all(bytes).and_then(|()| inner.output.flush());
            }
            1 if !latch => inner.registers.interrupts = last,
            register @ (0 | 1) => inner.registers.divisor[usize::from(register)] = last,
            3 => inner.registers.line = last,
            4 => inner.registers.modem = last,
            7 => inner.registers.scratch = last,
            _ => {}
        }
    }

    /// The guest reads `port`.
    pub(crate) fn read(&self, port: u16) -> u8 {
        let registers = self.inner.lock().unwrap_or_else(PoisonError::into_inner).registers;
        let latch = registers.line & DIVISOR_LATCH != 0;
        match port - SERIAL_PORT {
            0 if !latch => 0,
            1 if !latch => registers.interrupts,
            register @ (0 | 1) => registers.divisor[usize::from(register)],
            2 => 1,
            3 => registers.line,
            4 => registers.modem,
            5 => READY,
            6 => CONNECTED,
            7 => registers.scratch,
            _ => 0xff,
        }
    }

    /// The registers, to move.
    pub(crate) fn save(&self) -> [u8; 6] {
        let registers = self.inner.lock().unwrap_or_else(PoisonError::into_inner).registers;
        let Registers { interrupts, line, modem, scratch, divisor: [low, high] } = registers;
        [interrupts, line, modem, scratch, low, high]
    }

    /// Takes over saved registers.
    pub(crate) fn load(&self, bytes: &[u8]) -> Result<(), StateError> {
        let &[interrupts, line, modem, scratch, low, high] = bytes else {
            return Err(StateError::Malformed(format!(
                "the serial port's state has {} bytes",
                bytes.len()
            )));
        };
        let registers = Registers { interrupts, line, modem, scratch, divisor: [low, high] };
        self.inner.lock().unwrap_or_else(PoisonError::into_inner).registers = registers;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[derive(Clone, Default)]
    struct Sink(Arc<Mutex<Vec<u8>>>);

    impl Write for Sink {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().extend(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn data_is_sent_and_divisors_are_not() {
        let sink = Sink::default();
        let serial = Serial::new(Box::new(sink.clone()));
        serial.write(0x3fb, &[0x83]);
        serial.write(0x3f8, &[1]);
        serial.write(0x3fb, &[0x03]);
        serial.write(0x3f8, b"HB n=1\n");
        assert_eq!(*sink.0.lock().unwrap(), b"HB n=1\n");
        assert_eq!(serial.read(0x3fd) & 0x20, 0x20);
    }

    #[test]
    fn registers_survive_a_move() {
        let serial = Serial::new(Box::new(std::io::sink()));
        for (port, value) in
            [(0x3f9, 5), (0x3fb, 0x83), (0x3f8, 1), (0x3f9, 2), (0x3fc, 3), (0x3ff, 9)]
        {
            serial.write(port, &[value]);
        }
        let other = Serial::new(Box::new(std::io::sink()));
        other.load(&serial.save()).unwrap();
        assert_eq!(other.save(), [5, 0x83, 3, 9, 1, 2]);
        assert!(other.load(&[1, 2]).is_err());
    }
}

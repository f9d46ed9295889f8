//! Addresses: where a byte is in the guest, and where in a process of the host.
//!
//! They are kept apart by type, since mixing them up is the classic mistake of this field.

use std::fmt;

use crate::PAGE_SIZE;

macro_rules! address {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
        pub struct $name(pub u64);

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($name), "({:#x})"), self.0)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{:#x}", self.0)
            }
        }

        impl $name {
            /// The value `bytes` (or frames) further on, or `None` past the end of the address
            /// space.
            #[must_use]
            pub fn checked_add(self, bytes: u64) -> Option<Self> {
                self.0.checked_add(bytes).map(Self)
            }
        }
    };
}

address!(
    /// Guest physical address, in bytes.
    Gpa
);
address!(
    /// Guest frame number: a guest physical address divided by the page size.
    Gfn
);
address!(
    /// Host virtual address in the process that runs the guest, in bytes.
    Hva
);

impl Gpa {
    /// The frame this address lies in.
    #[must_use]
    pub fn frame(self) -> Gfn {
        Gfn(self.0 / PAGE_SIZE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frame_of_an_address() {
        assert_eq!(Gpa(0x1fff).frame(), Gfn(1));
        assert_eq!(Gpa(u64::MAX).checked_add(1), None);
        assert_eq!(format!("{:?} {}", Hva(0x10), Gfn(0xab)), "Hva(0x10) 0xab");
    }
}

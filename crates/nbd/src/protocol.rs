//! The numbers of the protocol (proto, "Values").

/// `NBDMAGIC`.
pub(crate) const GREETING: u64 = 0x4e42_444d_4147_4943;
/// `IHAVEOPT`.
pub(crate) const OPTION: u64 = 0x4948_4156_454f_5054;
pub(crate) const OPTION_REPLY: u64 = 0x0003_e889_0455_65a9;
pub(crate) const REQUEST: u32 = 0x2560_9513;
pub(crate) const SIMPLE_REPLY: u32 = 0x6744_6698;
pub(crate) const STRUCTURED_REPLY: u32 = 0x668e_33ef;

/// The server's and the client's flags of the handshake: the same bits.
pub(crate) const FIXED_NEWSTYLE: u16 = 1;
pub(crate) const NO_ZEROES: u16 = 2;

pub(crate) const OPT_GO: u32 = 7;
pub(crate) const OPT_STRUCTURED_REPLY: u32 = 8;
pub(crate) const OPT_SET_META_CONTEXT: u32 = 10;

pub(crate) const REP_ACK: u32 = 1;
pub(crate) const REP_INFO: u32 = 3;
pub(crate) const REP_META_CONTEXT: u32 = 4;
/// Option replies with this bit are errors.
pub(crate) const REP_ERROR: u32 = 1 << 31;

pub(crate) const INFO_EXPORT: u16 = 0;
pub(crate) const INFO_BLOCK_SIZE: u16 = 3;

/// Transmission flags.
pub(crate) const FLAG_READ_ONLY: u16 = 1 << 1;
pub(crate) const FLAG_FLUSH: u16 = 1 << 2;
pub(crate) const FLAG_WRITE_ZEROES: u16 = 1 << 6;
pub(crate) const FLAG_SEND_DF: u16 = 1 << 7;

/// The flag of a read that asks for one chunk.
pub(crate) const REQUEST_DF: u16 = 1 << 2;

/// Requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Command {
    Read = 0,
    Write = 1,
    Disconnect = 2,
    Flush = 3,
    WriteZeroes = 6,
    BlockStatus = 7,
}

impl Command {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::Disconnect => "disconnect",
            Self::Flush => "flush",
            Self::WriteZeroes => "write zeros",
            Self::BlockStatus => "tell the status of",
        }
    }
}

/// The flag of a structured reply's last chunk.
pub(crate) const DONE: u16 = 1;
pub(crate) const CHUNK_NONE: u16 = 0;
pub(crate) const CHUNK_DATA: u16 = 1;
pub(crate) const CHUNK_HOLE: u16 = 2;
pub(crate) const CHUNK_STATUS: u16 = 5;
/// Chunks with this bit are errors.
pub(crate) const CHUNK_ERROR: u16 = 1 << 15;
/// An error with the offset at which it happened.
pub(crate) const CHUNK_ERROR_AT: u16 = CHUNK_ERROR + 2;

/// The longest string of the protocol, names of exports and contexts and messages among them.
pub(crate) const STRING_MAX: u32 = 4096;

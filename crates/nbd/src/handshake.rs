//! The handshake: fixed newstyle, structured replies, contexts, NBD_OPT_GO (proto, "Newstyle
//! negotiation").

use std::io::{self, BufReader, Read, Write};

use crate::error::NbdError;
use crate::protocol::{
    FIXED_NEWSTYLE, FLAG_FLUSH, FLAG_READ_ONLY, FLAG_SEND_DF, FLAG_WRITE_ZEROES, GREETING,
    INFO_BLOCK_SIZE, INFO_EXPORT, NO_ZEROES, OPT_GO, OPT_SET_META_CONTEXT, OPT_STRUCTURED_REPLY,
    OPTION, OPTION_REPLY, REP_ACK, REP_ERROR, REP_INFO, REP_META_CONTEXT, STRING_MAX,
};
use crate::stream::Stream;

/// The longest answer to an option that is taken, and how many answers there may be to one.
const REPLY_MAX: u32 = STRING_MAX + 64;
const REPLIES_MAX: usize = 64;

/// Which export is wanted, and what for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wish {
    /// The export's name.
    pub export: String,
    /// The contexts that block status shall tell of, each exactly.
    pub contexts: Vec<String>,
    /// Whether it shall be written to.
    pub writable: bool,
    /// Whether a thread shall take in what the server answers, also while nobody takes it from
    /// the client: QEMU waits until all answers are sent when it changes its dirty bitmaps.
    pub ahead: bool,
}

impl Wish {
    /// An export to read from.
    #[must_use]
    pub fn new(export: &str) -> Self {
        Self { export: export.to_owned(), contexts: Vec::new(), writable: false, ahead: false }
    }

    /// The same with one more context.
    #[must_use]
    pub fn with_context(mut self, context: &str) -> Self {
        self.contexts.push(context.to_owned());
        self
    }

    /// The same with a thread that reads ahead.
    #[must_use]
    pub fn ahead(mut self) -> Self {
        self.ahead = true;
        self
    }

    /// The same to write to.
    #[must_use]
    pub fn writable(mut self) -> Self {
        self.writable = true;
        self
    }
}

/// What was agreed on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Export {
    /// Bytes.
    pub size: u64,
    /// The smallest length and alignment of a request, in bytes.
    pub block: u32,
    /// The longest read or write.
    pub request_max: u32,
    pub(crate) flags: u16,
    /// The numbers of the contexts, in the order in which they were wished for.
    pub(crate) contexts: Vec<u32>,
}

impl Export {
    pub(crate) fn can_flush(&self) -> bool {
        self.flags & FLAG_FLUSH != 0
    }

    pub(crate) fn can_answer_in_one(&self) -> bool {
        self.flags & FLAG_SEND_DF != 0
    }
}

/// Agrees with the server on `wish`; the transmission phase has begun when it returns.
pub(crate) fn negotiate(stream: &mut BufReader<Stream>, wish: &Wish) -> Result<Export, NbdError> {
    let mut talk = Talk { stream, export: &wish.export };
    talk.greet()?;
    talk.option(OPT_STRUCTURED_REPLY, &[], "structured replies", |_, _| Ok(()))?;
    let contexts =
        if wish.contexts.is_empty() { Vec::new() } else { talk.agree_on_contexts(wish)? };
    let mut export = talk.go(wish)?;
    export.contexts = contexts;
    Ok(export)
}

struct Talk<'a> {
    stream: &'a mut BufReader<Stream>,
    export: &'a str,
}

impl Talk<'_> {
    fn greet(&mut self) -> Result<(), NbdError> {
        if u64::from_be_bytes(self.read()?) != GREETING {
            return Err(self.broken("it does not greet as one"));
        }
        if u64::from_be_bytes(self.read()?) != OPTION {
            return Err(self.broken("it only knows the old style of negotiation"));
        }
        let flags = u16::from_be_bytes(self.read()?);
        if flags & FIXED_NEWSTYLE == 0 {
            return Err(self.broken("it does not know the fixed newstyle of negotiation"));
        }
        let answer = u32::from(flags & (FIXED_NEWSTYLE | NO_ZEROES));
        self.write(&answer.to_be_bytes())
    }

    fn agree_on_contexts(&mut self, wish: &Wish) -> Result<Vec<u32>, NbdError> {
        let mut data = string(&wish.export);
        data.extend((wish.contexts.len() as u32).to_be_bytes());
        wish.contexts.iter().for_each(|context| data.extend(string(context)));
        let mut numbers = vec![None; wish.contexts.len()];
        self.option(OPT_SET_META_CONTEXT, &data, "the contexts", |kind, answer| {
            let (number, name) = answer.split_first_chunk().ok_or("a context without a number")?;
            let place = wish.contexts.iter().position(|context| context.as_bytes() == name);
            match (kind, place) {
                (REP_META_CONTEXT, Some(place)) => {
                    numbers[place] = Some(u32::from_be_bytes(*number))
                }
                (REP_META_CONTEXT, None) => return Err("a context that was not asked for"),
                _ => {}
            }
            Ok(())
        })?;
        let missing = numbers.iter().position(Option::is_none);
        if let Some(place) = missing {
            let what = format!("the server does not know the context '{}'", wish.contexts[place]);
            return Err(NbdError::Unfit { export: self.export.to_owned(), what });
        }
        Ok(numbers.into_iter().flatten().collect())
    }

    fn go(&mut self, wish: &Wish) -> Result<Export, NbdError> {
        let mut data = string(&wish.export);
        data.extend(1u16.to_be_bytes());
        data.extend(INFO_BLOCK_SIZE.to_be_bytes());
        let (mut found, mut sizes) = (None, None);
        self.option(OPT_GO, &data, "the export", |kind, answer| {
            if kind != REP_INFO {
                return Ok(());
            }
            let (info, rest) = answer.split_first_chunk().ok_or("an information without a kind")?;
            match u16::from_be_bytes(*info) {
                INFO_EXPORT => {
                    let (size, rest) =
                        rest.split_first_chunk().ok_or("an export without a size")?;
                    let (flags, _) = rest.split_first_chunk().ok_or("an export without flags")?;
                    found = Some((u64::from_be_bytes(*size), u16::from_be_bytes(*flags)));
                }
                INFO_BLOCK_SIZE => {
                    let (least, rest) =
                        rest.split_first_chunk().ok_or("block sizes that are too short")?;
                    let most = rest.get(4..8).and_then(|bytes| bytes.try_into().ok());
                    let most = most.ok_or("block sizes that are too short")?;
                    sizes = Some((u32::from_be_bytes(*least), u32::from_be_bytes(most)));
                }
                _ => {}
            }
            Ok(())
        })?;
        let (size, flags) =
            found.ok_or_else(|| self.broken("it does not tell the size of the export"))?;
        // Without constraints from the server: any offset, and lengths up to 32 MiB (proto, "Block
        // size constraints").
        let (block, request_max) = sizes.unwrap_or((1, 32 << 20));
        let export = Export { size, block: block.max(1), request_max, flags, contexts: Vec::new() };
        if let Some(what) = unfit(&export, wish) {
            return Err(NbdError::Unfit { export: self.export.to_owned(), what });
        }
        Ok(export)
    }

    /// Sends an option and hands each answer to `take`, up to the acknowledgement.
    fn option(
        &mut self,
        option: u32,
        data: &[u8],
        what: &'static str,
        mut take: impl FnMut(u32, &[u8]) -> Result<(), &'static str>,
    ) -> Result<(), NbdError> {
        let mut request = OPTION.to_be_bytes().to_vec();
        request.extend(option.to_be_bytes());
        request.extend((data.len() as u32).to_be_bytes());
        request.extend(data);
        self.write(&request)?;
        for _ in 0..REPLIES_MAX {
            let (kind, answer) = self.answer(option)?;
            match kind {
                REP_ACK => return Ok(()),
                kind if kind & REP_ERROR != 0 => {
                    let words = String::from_utf8_lossy(&answer).into_owned();
                    let words = if words.is_empty() { refusal(kind) } else { words };
                    return Err(NbdError::Refused { export: self.export.to_owned(), what, words });
                }
                kind => take(kind, &answer).map_err(|wrong| self.broken(wrong))?,
            }
        }
        Err(self.broken("it does not come to an end with its answers to an option"))
    }

    fn answer(&mut self, option: u32) -> Result<(u32, Vec<u8>), NbdError> {
        if u64::from_be_bytes(self.read()?) != OPTION_REPLY {
            return Err(self.broken("an answer to an option does not begin like one"));
        }
        if u32::from_be_bytes(self.read()?) != option {
            return Err(self.broken("it answers an option that was not sent"));
        }
        let kind = u32::from_be_bytes(self.read()?);
        let length = u32::from_be_bytes(self.read()?);
        if length > REPLY_MAX {
            return Err(self.broken("an answer to an option is too long"));
        }
        let mut answer = vec![0; length as usize];
        self.stream.read_exact(&mut answer).map_err(|source| self.failed(source))?;
        Ok((kind, answer))
    }

    fn read<const N: usize>(&mut self) -> Result<[u8; N], NbdError> {
        let mut bytes = [0; N];
        self.stream.read_exact(&mut bytes).map_err(|source| self.failed(source))?;
        Ok(bytes)
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), NbdError> {
        self.stream.get_mut().write_all(bytes).map_err(|source| self.failed(source))
    }

    fn failed(&self, source: io::Error) -> NbdError {
        NbdError::Io { export: self.export.to_owned(), during: "the handshake", source }
    }

    fn broken(&self, what: &str) -> NbdError {
        NbdError::Protocol { export: self.export.to_owned(), what: what.to_owned() }
    }
}

/// What the export lacks for the wish.
fn unfit(export: &Export, wish: &Wish) -> Option<String> {
    if export.size > i64::MAX as u64 {
        return Some(format!("the server says that it has {} bytes", export.size));
    }
    if wish.writable && export.flags & FLAG_READ_ONLY != 0 {
        return Some("the server lets it be read only".to_owned());
    }
    if wish.writable && export.flags & FLAG_WRITE_ZEROES == 0 {
        return Some("the server cannot write zeros".to_owned());
    }
    if export.block > 4096 || export.request_max < 4096 {
        return Some("the server cannot do requests of 4 KiB".to_owned());
    }
    None
}

/// A string as the protocol has it.
fn string(text: &str) -> Vec<u8> {
    let mut bytes = (text.len() as u32).to_be_bytes().to_vec();
    bytes.extend(text.as_bytes());
    bytes
}

/// A server's refusal without words.
fn refusal(kind: u32) -> String {
    match kind & !REP_ERROR {
        1 => "it does not know that".to_owned(),
        2 => "its settings forbid that".to_owned(),
        5 => "it insists on TLS".to_owned(),
        6 => "it does not have it".to_owned(),
        7 => "it is ending".to_owned(),
        number => format!("error {number}"),
    }
}

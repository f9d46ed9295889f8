//! The fingerprints of one segment, owned by the thread that owns the segment.
//!
//! Three forms: nothing sent; all pages of one fingerprint (holes, zero pages), which takes no
//! memory however large the guest; one fingerprint a page.

use godwit_units::{ByteCount, PageIndex, PageRun};

use crate::{Account, Fingerprint, Key, RangeDigest};

/// A page in a range was not sent, or is forgotten: there is no digest of the range.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("nothing is known of {page}")]
pub struct Unknown {
    /// The first such page.
    pub page: PageIndex,
}

#[derive(Debug)]
enum Prints {
    /// All of the segment holds this; `None`: nothing was sent.
    Uniform(Option<Fingerprint>),
    /// One word a page; 0 where nothing was sent.
    Each(Box<[u64]>),
}

/// Fingerprints of the pages of one segment.
#[derive(Debug)]
pub struct SegmentFingerprints {
    run: PageRun,
    prints: Prints,
    /// The digest of all of them, as long as none of them changes.
    digest: Option<u128>,
    account: Account,
}

impl SegmentFingerprints {
    pub(crate) fn new(run: PageRun, account: Account) -> Self {
        assert!(run.count.0 > 0, "a segment has pages");
        Self { run, prints: Prints::Uniform(None), digest: None, account }
    }

    /// The pages that it is for.
    #[must_use]
    pub fn run(&self) -> PageRun {
        self.run
    }

    /// What `page` held when it was last sent.
    ///
    /// # Panics
    /// When `page` lies outside the segment, as in all methods: a mistake of the caller.
    #[must_use]
    pub fn print(&self, page: PageIndex) -> Option<Fingerprint> {
        let index = self.index(page);
        match &self.prints {
            Prints::Uniform(print) => *print,
            Prints::Each(words) => Fingerprint::from_word(words[index]),
        }
    }

    /// Whether `page` was sent and held then what `print` says: it need not be sent again.
    #[must_use]
    pub fn unchanged(&self, page: PageIndex, print: Fingerprint) -> bool {
        self.print(page) == Some(print)
    }

    /// Notes that `page` is sent with what `print` says.
    pub fn record(&mut self, page: PageIndex, print: Fingerprint) {
        self.put(PageRun::new(page.0, 1), Some(print));
    }

    /// Notes that all pages of `run` are sent with what `print` says: holes, with
    /// [`crate::Key::zero`].
    pub fn record_run(&mut self, run: PageRun, print: Fingerprint) {
        self.put(run, Some(print));
    }

    /// [`Self::unchanged`] and, if it is not, [`Self::record`]; true when the page must be sent.
    #[must_use]
    pub fn update(&mut self, page: PageIndex, print: Fingerprint) -> bool {
        let index = self.index(page);
        if let Prints::Each(words) = &mut self.prints {
            let changed = words[index] != print.word();
            if changed {
                words[index] = print.word();
                self.digest = None;
            }
            return changed;
        }
        let changed = !self.unchanged(page, print);
        self.record(page, print);
        changed
    }

    /// Forgets what was sent of `run`: it was not acknowledged, or the destination lost it.
    pub fn forget(&mut self, run: PageRun) {
        self.put(run, None);
    }

    /// Takes the fingerprints of `run` into `digest`, in order.
    ///
    /// # Errors
    /// When nothing is known of one of the pages; the digest is then of no use.
    pub fn digest(&self, run: PageRun, digest: &mut RangeDigest) -> Result<(), Unknown> {
        for page in run.start.0..run.end().0 {
            let page = PageIndex(page);
            digest.add(self.print(page).ok_or(Unknown { page })?);
        }
        Ok(())
    }

    /// The first page of which nothing is known.
    #[must_use]
    pub fn first_unknown(&self) -> Option<PageIndex> {
        let index = match &self.prints {
            Prints::Uniform(None) => Some(0),
            Prints::Uniform(Some(_)) => None,
            Prints::Each(words) => words.iter().position(|word| *word == 0),
        };
        index.map(|index| PageIndex(self.run.start.0 + index as u64))
    }

    /// The digest of the fingerprints of all its pages, where those of which nothing is known count
    /// as zeros: what was never sent is a hole at the destination. Made anew only when one of them
    /// has changed since.
    ///
    /// ```
    /// use godwit_fingerprints::{Key, PageFingerprints};
    /// use godwit_units::{PageIndex, PageRun};
    ///
    /// let (key, fingerprints) = (Key::new(7), PageFingerprints::new());
    /// let run = PageRun::new(0, 4096);
    /// let (mut one, mut other) = (fingerprints.segment(run), fingerprints.segment(run));
    /// one.record_run(run, key.zero());
    /// assert_eq!(one.digest_of_all(&key), other.digest_of_all(&key));
    /// other.record(PageIndex(9), key.page(&[1; 4096]));
    /// assert_ne!(one.digest_of_all(&key), other.digest_of_all(&key));
    /// ```
    pub fn digest_of_all(&mut self, key: &Key) -> u128 {
        if let Some(digest) = self.digest {
            return digest;
        }
        let mut digest = key.digest();
        for page in self.run.start.0..self.run.end().0 {
            digest.add(self.print(PageIndex(page)).unwrap_or_else(|| key.zero()));
        }
        *self.digest.insert(digest.finish())
    }

    /// Bytes that its fingerprints take.
    #[must_use]
    pub fn memory(&self) -> ByteCount {
        match &self.prints {
            Prints::Uniform(_) => ByteCount::ZERO,
            Prints::Each(words) => ByteCount(size_of_val::<[u64]>(words) as u64),
        }
    }

    fn index(&self, page: PageIndex) -> usize {
        let index = page.0.checked_sub(self.run.start.0).filter(|index| *index < self.run.count.0);
        let Some(index) = index else {
            panic!("{page} is not in the segment from {}", self.run.start)
        };
        index as usize
    }

    fn put(&mut self, run: PageRun, print: Option<Fingerprint>) {
        if run.count.0 == 0 {
            return;
        }
        let first = self.index(run.start);
        let last = self.index(PageIndex(run.end().0 - 1));
        let word = print.map_or(0, Fingerprint::word);
        if !matches!(&self.prints, Prints::Uniform(there) if *there == print) {
            self.digest = None;
        }
        match &mut self.prints {
            Prints::Uniform(there) if *there == print => {}
            _ if run.count == self.run.count => {
                self.release();
                self.prints = Prints::Uniform(print);
            }
            Prints::Uniform(there) => {
                let mut words = vec![there.map_or(0, Fingerprint::word); self.run.count.0 as usize]
                    .into_boxed_slice();
                words[first..=last].fill(word);
                self.prints = Prints::Each(words);
                self.account.add(self.memory().0);
            }
            Prints::Each(words) => words[first..=last].fill(word),
        }
    }

    fn release(&mut self) {
        self.account.subtract(self.memory().0);
    }
}

impl Drop for SegmentFingerprints {
    fn drop(&mut self) {
        self.release();
    }
}

#[cfg(test)]
mod tests;

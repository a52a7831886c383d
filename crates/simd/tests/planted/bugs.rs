//! The list of bugs that are planted in copies of this crate: `bugs.txt`, read.

/// A bug: of a file of `src/` one text becomes another.
#[derive(Debug, Clone)]
pub struct Bug {
    pub name: String,
    /// The kind of case that it takes to notice it: `size`, `value`, `layout`, `nan`, `function`, `bits`,
    /// `kept` memory, a `budget`, a `shard` or `heads` that differ; of `tiles` of bf16, and of their second `pieces`,
    /// a tier that has them.
    pub kind: String,
    pub file: String,
    /// The effect of the bug.
    pub story: String,
    pub old: String,
    pub new: String,
}

/// The bugs of the list.
pub fn all() -> Vec<Bug> {
    let entries = include_str!("bugs.txt").split("\n== ").skip(1);
    entries.filter_map(read).collect()
}

fn read(entry: &str) -> Option<Bug> {
    let (head, rest) = entry.split_once('\n')?;
    let (story, rest) = rest.split_once("\n-- instead of\n")?;
    let (old, new) = rest.split_once("\n-- is\n")?;
    let mut words = head.split(' ').map(str::to_string);
    Some(Bug {
        name: words.next()?,
        kind: words.next()?,
        file: words.next()?,
        story: story.to_string(),
        old: old.to_string(),
        new: new.to_string(),
    })
}

impl Bug {
    /// The file with the bug, which is there where `condition` holds; `None` unless it has the old text
    /// once.
    pub fn plant(&self, source: &str, condition: &str) -> Option<String> {
        let once = source.matches(&self.old).count() == 1;
        once.then(|| source.replace(&self.old, &self.new.replace("bug!()", condition)))
    }
}

//! Part of a tile that a mask allows.

/// Part of a tile that a mask allows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cover {
    /// No pair of the tile is allowed.
    None,
    /// Some pairs may be allowed and some forbidden.
    Some,
    /// Every pair of the tile is allowed.
    All,
}

impl Cover {
    /// The cover of a tile by a mask that allows a pair where every one of several masks does, as far
    /// as their covers decide it. Without masks: `All`.
    pub fn all(covers: impl IntoIterator<Item = Cover>) -> Cover {
        Cover::combine(covers, Cover::All, Cover::None)
    }

    /// The cover of a tile by a mask that allows a pair where at least one of several masks does, as
    /// far as their covers decide it. Without masks: `None`.
    pub fn any(covers: impl IntoIterator<Item = Cover>) -> Cover {
        Cover::combine(covers, Cover::None, Cover::All)
    }

    /// `decisive` if one of the covers is, else `Some` if one of them is, else `neutral`.
    fn combine(covers: impl IntoIterator<Item = Cover>, neutral: Cover, decisive: Cover) -> Cover {
        let mut combined = neutral;
        for cover in covers {
            match cover {
                Cover::Some => combined = Cover::Some,
                cover if cover == decisive => return decisive,
                _ => {}
            }
        }
        combined
    }

    /// The cover of a tile from the covers of its parts. Without parts: `None`.
    pub fn of_parts(parts: impl IntoIterator<Item = Cover>) -> Cover {
        let mut parts = parts.into_iter();
        let Some(first) = parts.next() else { return Cover::None };
        if first != Cover::Some && parts.all(|part| part == first) { first } else { Cover::Some }
    }

    /// The cover of a tile by [`crate::Mask::Segments`], from the ids of its queries and keys. The
    /// cover depends on the sets of ids alone: a run of equal ids may be given as one id.
    pub fn of_segments(
        query: impl Iterator<Item = i64>,
        key: impl Iterator<Item = i64> + Clone,
    ) -> Cover {
        let (mut allowed, mut forbidden) = (false, false);
        for query in query {
            for key in key.clone() {
                let same = query >= 0 && query == key;
                allowed |= same;
                forbidden |= !same;
                if allowed && forbidden {
                    return Cover::Some;
                }
            }
        }
        if allowed { Cover::All } else { Cover::None }
    }
}

//! Messages between a suite and a process that answers its requests: frames ([`crate::wire`]) with a header as JSON.
//! The tensors of several requests have the number of each before their names.

use crate::tensor::Tensors;

/// The kinds of these frames, which the live judge does not use.
pub const QUESTION: u32 = 101;
pub const ANSWER: u32 = 102;

/// The name of what is read or written, in errors.
pub const WIRE: &str = "a message";

/// The tensors of several lists, with the number of the list before each name.
pub fn numbered(lists: Vec<Tensors>) -> Tensors {
    let named = |(number, list): (usize, Tensors)| {
        list.into_iter().map(move |(name, x)| (format!("{number}/{name}"), x))
    };
    lists.into_iter().enumerate().flat_map(named).collect()
}

/// The reverse, of so many lists.
pub fn by_number(tensors: Tensors, count: usize) -> Result<Vec<Tensors>, String> {
    let mut lists: Vec<Tensors> = (0..count).map(|_| Tensors::new()).collect();
    for (name, x) in tensors {
        let parts =
            name.split_once('/').and_then(|(number, name)| Some((number.parse().ok()?, name)));
        let place =
            parts.and_then(|(number, name): (usize, _)| Some((lists.get_mut(number)?, name)));
        let (list, name) = place.ok_or_else(|| format!("a tensor {name} of no list"))?;
        list.insert(name.to_string(), x);
    }
    Ok(lists)
}

/// An error in words.
pub fn said(error: impl ToString) -> String {
    error.to_string()
}

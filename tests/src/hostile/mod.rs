//! A peer that keeps to the protocol until it has a link, and then breaks it: the attacker, its victim, and the
//! victim's other clients. `tests/hostile_peer.rs` starts them and checks what has to hold.
//!
//! `scenario helper hostile victim|friend|attack …`; the function of each program documents it.

pub mod attacker;
pub mod attacks;
pub mod victim;

/// Bytes of a request, and of its answer.
pub const REQUEST: usize = 64;
/// The first byte of a request whose answer is all that the connection has room for.
pub const STREAM: u8 = b's';

/// Runs one of the programs. Returns whether all went as it should.
pub fn main(words: &[String]) -> bool {
    let word = |i: usize| words.get(i).map_or("", String::as_str);
    let number = |i: usize| word(i).parse().unwrap_or(0);
    match word(0) {
        "victim" => victim::serve(word(1), number(2), word(3)),
        "friend" => victim::visit(number(1) as u16),
        "attack" => attacks::run(number(1) as u16, word(2), word(3)),
        "ask" => attacks::ask_about(number(1) as u16, number(2) as u16, number(3) as u32),
        _ => false,
    }
}

/// Ends the process when its stdin ends.
pub fn end_with_stdin() {
    std::thread::spawn(|| {
        use std::io::Read;
        let _ = std::io::stdin().lock().read_to_end(&mut Vec::new());
        std::process::exit(0);
    });
}

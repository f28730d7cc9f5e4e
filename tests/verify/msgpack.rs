//! MessagePack as Redis' `cmsgpack` writes and reads it, for the values that records hold: whole numbers, texts, arrays.
//!
//! A table is an array if its keys are 1 to n, an empty one too; a whole number takes the shortest form. Maps, nil and fractions are
//! errors: a record never holds one.

use mlua::{Lua, Table, Value as Lv};

/// One value of a record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Value {
    Number(u64),
    Bytes(Vec<u8>),
    Array(Vec<Value>),
}

/// Packs a value of Lua.
pub fn pack(value: &Lv, out: &mut Vec<u8>) -> mlua::Result<()> {
    let wrong = |what: &str| mlua::Error::runtime(format!("a record holds {what}"));
    match value {
        Lv::Integer(number) => pack_number(u64::try_from(*number).map_err(|_| wrong("a negative number"))?, out),
        Lv::Number(number) if number.fract() == 0.0 && *number >= 0.0 && *number < 9.1e15 => {
            #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "whole and in range, checked above")]
            pack_number(*number as u64, out);
        }
        Lv::String(text) => {
            let bytes = text.as_bytes();
            pack_head(bytes.len(), [(31, 0xa0), (0xff, 0xd9), (0xffff, 0xda), (usize::MAX, 0xdb)], out);
            out.extend_from_slice(&bytes);
        }
        Lv::Table(table) => {
            let length = table.raw_len();
            let pairs = table.clone().pairs::<Lv, Lv>().count();
            if pairs != length {
                return Err(wrong("a map, or an array with a hole"));
            }
            pack_head(length, [(15, 0x90), (0, 0), (0xffff, 0xdc), (usize::MAX, 0xdd)], out);
            for place in 1..=length {
                pack(&table.raw_get::<Lv>(place)?, out)?;
            }
        }
        other => return Err(wrong(other.type_name())),
    }
    Ok(())
}

fn pack_number(number: u64, out: &mut Vec<u8>) {
    let bytes = number.to_be_bytes();
    match number {
        0..=0x7f => out.push(bytes[7]),
        0x80..=0xff => out.extend([0xcc, bytes[7]]),
        0x100..=0xffff => {
            out.push(0xcd);
            out.extend_from_slice(&bytes[6..]);
        }
        0x1_0000..=0xffff_ffff => {
            out.push(0xce);
            out.extend_from_slice(&bytes[4..]);
        }
        _ => {
            out.push(0xcf);
            out.extend_from_slice(&bytes);
        }
    }
}

/// The shortest head that fits: in the first byte itself, then with one, two and four bytes of length.
fn pack_head(length: usize, forms: [(usize, u8); 4], out: &mut Vec<u8>) {
    let place = forms.iter().position(|(most, _)| length <= *most).expect("the last form takes all");
    let bytes = u32::try_from(length).expect("a short value").to_be_bytes();
    match place {
        0 => out.push(forms[0].1 | bytes[3]),
        1 => out.extend([forms[1].1, bytes[3]]),
        2 => out.extend([forms[2].1, bytes[2], bytes[3]]),
        _ => {
            out.push(forms[3].1);
            out.extend_from_slice(&bytes);
        }
    }
}

/// Reads a whole record.
pub fn unpack(packed: &[u8]) -> Result<Value, String> {
    let mut rest = packed;
    let value = unpack_one(&mut rest)?;
    if rest.is_empty() { Ok(value) } else { Err(format!("{} bytes too many", rest.len())) }
}

fn unpack_one(rest: &mut &[u8]) -> Result<Value, String> {
    let first = take(rest, 1)?[0];
    let mut number = |bytes: usize| take(rest, bytes).map(|raw| raw.iter().fold(0_u64, |sum, byte| sum << 8 | u64::from(*byte)));
    Ok(match first {
        0..=0x7f => Value::Number(u64::from(first)),
        0xcc => Value::Number(number(1)?),
        0xcd => Value::Number(number(2)?),
        0xce => Value::Number(number(4)?),
        0xcf => Value::Number(number(8)?),
        0xa0..=0xbf => Value::Bytes(take(rest, usize::from(first & 0x1f))?.to_vec()),
        0xd9..=0xdb => {
            let length = number(1 << (first - 0xd9))?;
            Value::Bytes(take(rest, length_of(length)?)?.to_vec())
        }
        0x90..=0x9f => unpack_array(rest, usize::from(first & 0x0f))?,
        0xdc | 0xdd => {
            let length = number(2 << (first - 0xdc))?;
            unpack_array(rest, length_of(length)?)?
        }
        other => return Err(format!("the byte {other:#04x} begins no value of a record")),
    })
}

fn unpack_array(rest: &mut &[u8], length: usize) -> Result<Value, String> {
    (0..length).map(|_| unpack_one(rest)).collect::<Result<_, _>>().map(Value::Array)
}

fn length_of(length: u64) -> Result<usize, String> {
    usize::try_from(length).map_err(|error| error.to_string())
}

fn take<'a>(rest: &mut &'a [u8], bytes: usize) -> Result<&'a [u8], String> {
    let (taken, left) = rest.split_at_checked(bytes).ok_or("it ends early")?;
    *rest = left;
    Ok(taken)
}

/// A value as Lua sees it.
pub fn to_lua(lua: &Lua, value: &Value) -> mlua::Result<Lv> {
    Ok(match value {
        #[expect(clippy::cast_precision_loss, reason = "Lua 5.1 has doubles alone; so has Redis")]
        Value::Number(number) => Lv::Number(*number as f64),
        Value::Bytes(bytes) => Lv::String(lua.create_string(bytes)?),
        Value::Array(values) => {
            let table: Table = lua.create_table_with_capacity(values.len(), 0)?;
            for (place, value) in (1..).zip(values) {
                table.raw_set(place, to_lua(lua, value)?)?;
            }
            Lv::Table(table)
        }
    })
}

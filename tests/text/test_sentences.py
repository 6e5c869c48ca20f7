"""A pasted paragraph is cut where a sentence ends, nowhere else, and nothing of it is lost."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from text.sentences import join, sentences

ONE = [  # lines of one sentence: | would stand where they are cut
    "",
    "   ",
    "。",
    "今天天气很好",
    "今天天气很好。",
    "真的吗？！",
    "“今天天气很好。”",
    "（完。）",
    "……",
    "圆周率是3.14，网址是a.com。",
    "他说：“你好。我走了。”",
    "“你好吗？”她问。",
    "“一切终于好起来了。”他说。",
    "他（一九九八年生。）来自北京。",
    "他喜欢“红楼梦”这本书。",
    "He said “No.” and left.",
    "我喜欢《你好吗？》这本书。",
    "他等了……又等。",
    "花了3.5亿元",
    "经济增长３．５％。",
    "他等了...又等。",
    "Ａ．Ｂ．Ｃ公司",
    "作家J．K．罗琳来了。",
    "Mr. Li met Dr. J. R. Wang of the U.S. Army.",
    "It cost 3.50 at noon, e.g. in No. 5 street.",
    "3. The third rule.",
    "他大喊“救命！”，然后跑了。",
    "人们高喊“加油！”的口号。",
    "那句“我不去。”的话。",
    "她问：“真的？”。",
    "写着“欢迎！”、“你好！”和“再见！”。",
    'He asked "Why?", then left.',
    "作家J.K.罗琳来到北京。",
    "他是Dr. Wang的学生。",
    "皇马vs.巴萨的比赛",
    "The talks opened on Jan. 5 at 10 a.m. Monday.",
    "Huawei Technologies Co. Ltd. Chairman Ren spoke.",
    '"Stop!" he said.',
    "He said (She left. Really.) nothing.",
    "Yahoo! rose.",
    "Wait... what?",
    "有三个原因：1.时间不够；2.经费不足；3.人手不够。",
    "Two reasons: 1. Time is short; 2. Money is short.",
    "一．概述",
]
SEVERAL = [
    "我来了。|我看见了！|我赢了？|好",
    "我来了。 |我看见了。",
    "真的！！！|是吗？！|是。",
    "他说：“好。”|然后他走了。",
    "“你好。”|“再见。”",
    "他说“好！”|她也说“好！”",
    "【新华社】他来了。|他走了。",
    "“" + "长" * 90 + "。|短。”|完。",
    "“没有合上。|他走了。",
    "他用Python.|然后他走了。",
    "来了。|走了。。 ！ ",
    "他来了．|他走了．",
    "他说：“一切都好。”|与此同时，股价下跌。",
    "She moved to Montréal. |Her son stayed.",
    "Is it 5 p.m.? |Then go.",
    "5! |Then go.",
    "He came. |He saw! |Did he win? |Yes",
    'He said "no." |Then he left.',
    "He is 5. |It was 1998. |Then (really) it ended.",
    "“Go.” |“No.”",
    "It grew by 12345678901234567890. |Then he left.",
    "Prices rose 3.5%. |Mr. Li left.",
    "He left.\u3000|她来了。",
    "一。|Two. |三。",
    "比分3:2.|我们赢了。",
    "In May 5, 19. |Then he left.",
]


@pytest.mark.parametrize("line", ONE)
def test_one_sentence_stays_as_it_is(line):
    assert sentences(line) == [line]


@pytest.mark.parametrize("marked", SEVERAL)
def test_a_paragraph_is_cut_behind_each_sentence(marked):
    assert sentences(marked.replace("|", "")) == marked.split("|")


@given(st.text("好a1 .。！？!?“”\"'（）()A\n\u3000…"))
def test_nothing_is_lost_and_every_piece_has_a_word(line):
    pieces = sentences(line)
    assert "".join(pieces) == line
    assert len(pieces) == 1 or all(any(map(str.isalnum, piece)) for piece in pieces)


@pytest.mark.parametrize("text", ["。 ", ")", '"', ". ", "He came. "])
def test_a_long_line_takes_time_in_proportion(text):
    def seconds(line: str) -> float:
        begun = time.process_time()
        join(sentences(line))
        return time.process_time() - begun

    # In proportion it would be 16 times as long, by the square of the length 256 times.
    assert seconds(text * 32_000) < 64 * max(seconds(text * 2_000), 0.002)


@pytest.mark.parametrize(
    "texts, line",
    [
        ([], ""),
        ([""], ""),
        (["He came.", "", "He saw."], "He came. He saw."),
        (["他来了。", "他走了。"], "他来了。他走了。"),
        (["One  piece "], "One  piece "),
        (["他来了", "A."], "他来了A."),
        (["“你好。”", "他走了……", "又来了——", "坐下。"], "“你好。”他走了……又来了——坐下。"),
        (["“Go!”", "He went."], "“Go!” He went."),
    ],
)
def test_translations_are_joined(texts, line):
    assert join(texts) == line
